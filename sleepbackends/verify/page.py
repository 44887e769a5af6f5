"""A verification as one HTML page."""

from __future__ import annotations

from xml.etree.ElementTree import SubElement

from sleepbackends.pages.parts import Page, add_section, add_table
from sleepbackends.verify.results import Outcome, Verification

_SAID = {Outcome.PASSED: "kept", Outcome.FAILED: "broken", Outcome.SKIPPED: "not tried"}


def page(verification: Verification) -> str:
    """Return a page that can be read on its own."""
    report = Page(f"{verification.backend}: the contract on this machine", verification.summary)
    main = report.main
    if verification.problem or not verification.availability:
        said = verification.problem or str(verification.availability.hint)
        SubElement(main, "pre").text = said
    for number, result in enumerate(verification.failures(), 1):
        section = add_section(main, f"Broken promise {number}: {result.case.promise or 'unnamed'}")
        add_table(
            section,
            [("", ""), ("test", result.case.name), ("seen", result.message)],
            "facts",
        )
        details = SubElement(section, "details")
        SubElement(details, "summary").text = "Where that was"
        SubElement(SubElement(details, "div", {"class": "scroll"}), "pre").text = result.details
    if verification.results:
        rows = [
            (promise.key, _SAID[outcome], promise.value)
            for promise, outcome in verification.promises().items()
        ]
        section = add_section(main, "Promises")
        add_table(section, [("promise", "here", "what it says"), *rows], "facts")
        section = add_section(main, "Parts of the suite")
        add_table(
            section, [("part", *(o.value for o in Outcome)), *_parts(verification)], "numbers"
        )
    if verification.skipped():
        counted = [(reason, str(count)) for reason, count in verification.skipped().items()]
        add_table(add_section(main, "Not tried"), [("why", "tests"), *counted], "numbers")
    facts = [*verification.about.items(), ("declares", ", ".join(verification.capabilities))]
    facts += [(f"option {name}", repr(value)) for name, value in verification.options.items()]
    add_table(add_section(main, "What was verified"), [("", ""), *facts], "facts")
    if verification.results:
        tests = [
            (r.case.name, r.case.part, r.outcome.value, f"{r.seconds:.3f}")
            for r in verification.results
        ]
        section = add_section(main, "Every test")
        add_table(section, [("test", "part", "outcome", "seconds"), *tests], "numbers")
    return report.text()


def _parts(verification: Verification) -> list[tuple[str, ...]]:
    rows = []
    for part in verification.parts():
        counts = verification.counts(part)
        rows.append((part, *(str(counts[outcome]) for outcome in Outcome)))
    return rows
