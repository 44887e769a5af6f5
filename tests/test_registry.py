from __future__ import annotations

import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any, ClassVar

import pytest
from pydantic import BaseModel, ConfigDict

from sleepbackends.availability import Availability
from sleepbackends.capabilities import Capabilities
from sleepbackends.control import Control
from sleepbackends.errors import (
    BackendUnavailableError,
    ConfigurationError,
    IncompatibleBackendError,
    InvalidOptionsError,
    PluginError,
    UnknownBackendError,
)
from sleepbackends.hookspecs import BackendSpec
from sleepbackends.plugins import (
    DisabledPlugin,
    FailureKind,
    LoadedPlugins,
    PluginFailure,
    RegisteredBackend,
    Source,
)
from sleepbackends.policies import Policies
from sleepbackends.protocol import API_VERSION
from sleepbackends.registry import Registry
from sleepbackends.settings import BackendSettings

SOURCE = Source("tp-dist", "2.0")
SETTINGS = BackendSettings(wait_for_memory_s=4.0)


class Good:
    """Keeps to the contract; the wrong ones below differ in one thing each."""

    name = "fake"
    api_version = API_VERSION
    capabilities: Any = Capabilities(supports_offload=True)
    closed: ClassVar[list[object]] = []

    def __init__(self, options: object, settings: BackendSettings) -> None:
        self.options = options
        self.settings = settings

    @classmethod
    def probe(cls) -> Any:
        return Availability(True, "found it")

    def suspend(
        self,
        level: int = 1,
        *,
        policies: Policies | None = None,
        control: Control | None = None,
    ) -> Any: ...
    def resume(
        self, tags: Collection[str] | None = None, *, control: Control | None = None
    ) -> Any: ...
    def discard(self, tags: Collection[str], *, control: Control | None = None) -> Any: ...
    def state(self) -> Any: ...
    def mark_valid(self, tags: Collection[str]) -> Any: ...
    def close(self) -> None:
        self.closed.append(self)


class Options(BaseModel):
    model_config = ConfigDict(extra="forbid")

    chunk_bytes: int = 4
    directory: Path = Path("/")


def registry(target: str, model: str | None = None, version: int = API_VERSION) -> Registry:
    spec = BackendSpec("fake", target, version, model)
    return Registry(LoadedPlugins({"fake": RegisteredBackend(spec, SOURCE)}))


def offer(
    monkeypatch: pytest.MonkeyPatch, backend: object, model: object = None, version: int = 1
) -> Registry:
    """Build a registry with one backend, ``fake``, which a module of this test file holds."""
    module = sys.modules[__name__]
    monkeypatch.setattr(module, "offered", backend, raising=False)
    monkeypatch.setattr(module, "offered_model", model, raising=False)
    path = f"{__name__}:offered_model" if model is not None else None
    return registry(f"{__name__}:offered", path, version)


def variant(**attributes: Any) -> type[Good]:
    return type("Variant", (Good,), attributes)


def test_specs_are_listed_without_importing() -> None:
    known = registry("tp_absent:Backend").specs
    assert known["fake"].source is SOURCE
    with pytest.raises(TypeError):
        known["other"] = known["fake"]  # type: ignore[index]


def test_unknown_backend_lists_known_ones_close_matches_and_suspects() -> None:
    plugins = LoadedPlugins(
        dict(registry("a:B").specs),
        [PluginFailure(Source("tp-broken"), "entry", "no libcuda", FailureKind.IMPORT)],
        [DisabledPlugin(Source("tp-disabled"), "switched-off")],
    )
    with pytest.raises(UnknownBackendError) as raised:
        Registry(plugins).get("fkae")
    assert raised.value.known == ("fake",)
    for part in ("'fkae'", "did you mean 'fake'", "tp-broken", "no libcuda", "switched-off"):
        assert part in str(raised.value)


def test_unknown_backend_of_an_empty_registry_says_so() -> None:
    with pytest.raises(UnknownBackendError, match="known: none"):
        Registry(LoadedPlugins()).get("host")


def test_good_class_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert offer(monkeypatch, Good).load_class("fake") is Good


@pytest.mark.parametrize("target", ["tp_absent:X", f"{__name__}:Absent", f"{__name__}:Good.x"])
def test_failing_import_names_the_plugin(target: str) -> None:
    with pytest.raises(PluginError, match=r"tp-dist 2\.0.*importing") as raised:
        registry(target).load_class("fake")
    assert raised.value.backend == "fake"


def test_exit_on_import_does_not_exit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tp_exits.py").write_text("raise SystemExit(1)")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(PluginError, match="SystemExit"):
        registry("tp_exits:X").load_class("fake")


@pytest.mark.parametrize(("version", "update"), [(0, "tp-dist"), (99, "sleepbackends")])
def test_other_version_is_refused_before_the_import(version: int, update: str) -> None:
    with pytest.raises(IncompatibleBackendError, match=f"version {version} .*version 1") as raised:
        registry("tp_absent:X", version=version).load_class("fake")
    assert update in raised.value.hint


def test_class_of_another_version_than_its_plugin_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(IncompatibleBackendError, match="version 7"):
        offer(monkeypatch, variant(api_version=7)).load_class("fake")


WRONG: dict[str, tuple[object, str]] = {
    "not a class": (Good.suspend, "not a class"),
    "no method": (variant(discard=None), "no method discard"),
    "no probe": (variant(probe=None), "no method probe"),
    "probe of an instance": (variant(probe=lambda self: Availability(True)), "classmethod"),
    "level missing": (
        variant(suspend=lambda self, *, policies=None, control=None: None),
        "suspend",
    ),
    "control missing": (variant(resume=lambda self, tags=None: None), "resume"),
    "tags required": (variant(resume=lambda self, tags, *, control=None: None), "resume"),
    "tags renamed": (variant(discard=lambda self, names, *, control=None: None), "discard"),
    "more required": (variant(state=lambda self, verbose: None), "state"),
    "static without tags": (variant(mark_valid=staticmethod(lambda: None)), "mark_valid"),
    "name of another": (variant(name="other"), "name is 'other'"),
    "name as a property": (variant(name=property(lambda self: "fake")), "name is <property"),
    "no version": (variant(api_version=None), "api_version is None"),
}


@pytest.mark.parametrize(("backend", "said"), WRONG.values(), ids=WRONG.keys())
def test_class_outside_the_contract_is_refused(
    monkeypatch: pytest.MonkeyPatch, backend: object, said: str
) -> None:
    with pytest.raises(PluginError, match=said):
        offer(monkeypatch, backend).load_class("fake")


def test_wider_signatures_are_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    def anything(*args: object, **kwargs: object) -> None: ...

    wide = variant(suspend=anything, resume=staticmethod(anything), state=classmethod(anything))
    assert offer(monkeypatch, wide).load_class("fake") is wide


def probing(answer: object) -> type[Good]:
    def probe(cls: type) -> object:
        if isinstance(answer, BaseException):
            raise answer
        return answer

    return variant(probe=classmethod(probe))


def test_probe_passes_the_answer_on(monkeypatch: pytest.MonkeyPatch) -> None:
    no = Availability(False, "no device", "plug one in")
    assert offer(monkeypatch, probing(no)).probe("fake") is no


@pytest.mark.parametrize(
    ("backend", "said"),
    [
        (probing(OSError("no libcuda")), "OSError: no libcuda"),
        (probing(SystemExit(1)), "SystemExit"),
        (probing(True), "answered True"),
        (probing(None), "answered None"),
        (variant(state=None), "no method state"),
    ],
)
def test_probe_never_raises(monkeypatch: pytest.MonkeyPatch, backend: object, said: str) -> None:
    answer = offer(monkeypatch, backend).probe("fake")
    assert not answer.ok
    assert said in answer.reason
    assert "tp-dist" in answer.hint


def test_probe_of_an_unknown_name_does_not_raise() -> None:
    assert "unknown backend" in Registry(LoadedPlugins()).probe("x").reason


def test_create_hands_over_options_and_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    made: Any = offer(monkeypatch, Good, Options).create("fake", {"chunk_bytes": "9"}, SETTINGS)
    assert made.options == Options(chunk_bytes=9)
    assert made.settings is SETTINGS


def test_create_without_options_model_passes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    made: Any = offer(monkeypatch, Good).create("fake", {}, SETTINGS)
    assert made.options is None


def test_wrong_options_are_all_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"chunk_byte": 1, "chunk_bytes": "many"}
    with pytest.raises(InvalidOptionsError) as raised:
        offer(monkeypatch, Good, Options).create("fake", given, SETTINGS)
    said = str(raised.value)
    for part in ("chunk_byte:", "did you mean 'chunk_bytes'", "'many'", "directory", "'fake'"):
        assert part in said
    assert isinstance(raised.value, ConfigurationError)


def test_options_for_a_backend_without_any(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidOptionsError, match=r"no options.*chunk"):
        offer(monkeypatch, Good).create("fake", {"chunk": 1}, SETTINGS)


@pytest.mark.parametrize("model", [Good, "text"])
def test_options_model_must_be_a_model(monkeypatch: pytest.MonkeyPatch, model: object) -> None:
    with pytest.raises(PluginError, match="not a pydantic model"):
        offer(monkeypatch, Good, model).options_model("fake")


def test_unavailable_backend_is_not_constructed(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = probing(Availability(False, "no device", "plug one in"))
    monkeypatch.setattr(backend, "__init__", lambda *_: pytest.fail("constructed"))
    with pytest.raises(BackendUnavailableError, match="no device") as raised:
        offer(monkeypatch, backend).create("fake", {}, SETTINGS)
    assert raised.value.hint == "plug one in"


def raising(error: Exception) -> type[Good]:
    def fail(self: object, *args: object) -> None:
        raise error

    return variant(__init__=fail)


def test_foreign_error_while_constructing_is_the_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PluginError, match="RuntimeError: driver"):
        offer(monkeypatch, raising(RuntimeError("driver"))).create("fake", {}, SETTINGS)


def test_own_error_while_constructing_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    error = BackendUnavailableError("gone meanwhile")
    with pytest.raises(BackendUnavailableError) as raised:
        offer(monkeypatch, raising(error)).create("fake", {}, SETTINGS)
    assert raised.value is error


@pytest.mark.parametrize("capabilities", [None, {}, property(lambda self: 1 / 0)])
def test_instance_without_capabilities_is_closed_again(
    monkeypatch: pytest.MonkeyPatch, capabilities: object
) -> None:
    backend = variant(capabilities=capabilities, closed=[])
    with pytest.raises(PluginError, match="not Capabilities"):
        offer(monkeypatch, backend).create("fake", {}, SETTINGS)
    assert len(backend.closed) == 1


def test_declared_capabilities_need_no_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    assert offer(monkeypatch, Good).declared_capabilities("fake") == Good.capabilities
    silent = variant(capabilities=property(lambda self: Capabilities()))
    assert offer(monkeypatch, silent).declared_capabilities("fake") is None
    assert registry("tp_absent:X").declared_capabilities("fake") is None
