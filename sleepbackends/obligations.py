"""What an engine is owed before it may serve again."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from sleepbackends.capabilities import Capabilities
from sleepbackends.engine import EngineHooks
from sleepbackends.errors import HookError


class Obligations:
    """Runs engine hooks, and remembers those that are still owed after one raised.

    Parameters
    ----------
    hooks : EngineHooks
        The engine's callbacks. A hook the engine does not have is owed to nobody.
    """

    def __init__(self, hooks: EngineHooks) -> None:
        self._hooks = hooks
        self._stale_tags: frozenset[str] = frozenset()
        self._owed: dict[str, tuple[Any, ...]] = {}
        self._torn_down = False

    @property
    def pending(self) -> tuple[str, ...]:
        """Names of the hooks that have to run before the engine may serve."""
        return (("drop_caches",) if self._stale_tags else ()) + tuple(self._owed)

    def stale(self, tags: Collection[str]) -> None:
        """Owe the engine to drop what it computed from these tags' contents."""
        self._stale_tags |= frozenset(tags)

    def tear_down(self, capabilities: Capabilities) -> None:
        """Prepare for a suspend: tear down communicators that would not survive it.

        Raises
        ------
        HookError
            If the hook raised.
        """
        if not capabilities.preserves_communicators and not self._torn_down:
            self._owed["rebuild_communicators"] = ()
            self.call("teardown_communicators")
            self._torn_down = True

    def suspended(self, capabilities: Capabilities) -> None:
        """Owe what does not survive a suspend, as the flags say."""
        if not capabilities.preserves_compiled_artifacts:
            self._owed["recompile"] = ()
        if not capabilities.preserves_addresses:
            self._owed["recapture_graphs"] = (False,)
        elif not capabilities.preserves_graphs_with_communicators:
            self._owed.setdefault("recapture_graphs", (True,))

    def drop_caches(self) -> None:
        """Have the engine drop its caches of contents that are gone.

        Raises
        ------
        HookError
            If the hook raised; it is still owed.
        """
        if self._stale_tags:
            self.call("drop_caches", self._stale_tags)
            self._stale_tags = frozenset()

    def discharge(self, *names: str) -> None:
        """Run the named hooks as far as they are owed.

        Raises
        ------
        HookError
            If one raised; it and those after it are still owed.
        """
        for name in names:
            if name in self._owed:
                if name == "rebuild_communicators":
                    # Half-built ones must be torn down again before another suspend.
                    self._torn_down = False
                self.call(name, *self._owed[name])
                del self._owed[name]

    def call(self, name: str, *args: Any) -> None:
        """Call a hook, if the engine has it.

        Raises
        ------
        HookError
            If it raised, with its exception as the cause.
        """
        hook = getattr(self._hooks, name)
        if hook is None:
            return
        try:
            hook(*args)
        except Exception as error:
            raise HookError(
                f"engine hook {name} raised {error!r}",
                hint="the engine does not serve; mend the cause and make the same call again, "
                "or wake_up()",
                hook=name,
            ) from error
