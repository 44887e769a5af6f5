"""A verification as JUnit XML, which test services read."""

from __future__ import annotations

import re
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from sleepbackends.verify.results import Outcome, TestResult, Verdict, Verification

# What XML 1.0 cannot hold, however it is written.
_FORBIDDEN = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit(verification: Verification) -> str:
    """Return the document."""
    counts = verification.counts()
    problems = int(bool(verification.problem))
    skipped = counts[Outcome.SKIPPED] + (verification.verdict is Verdict.UNAVAILABLE)
    numbers = {
        "tests": str(len(verification.results) + problems + (not verification.availability)),
        "failures": str(counts[Outcome.FAILED]),
        "errors": str(problems),
        "skipped": str(skipped),
        "time": f"{verification.seconds:.3f}",
    }
    suites = Element("testsuites", {"name": "sleepbackends verify", **numbers})
    suite = SubElement(suites, "testsuite", {"name": verification.backend, **numbers})
    properties = SubElement(suite, "properties")
    for name, value in {
        **verification.about,
        "capabilities": ", ".join(verification.capabilities),
    }.items():
        SubElement(properties, "property", {"name": name, "value": _clean(value)})
    for result in verification.results:
        _case(suite, verification.backend, result)
    if verification.problem:
        case = _new_case(suite, verification.backend, "the suite comes to its end")
        line = verification.problem.splitlines()[0]
        SubElement(case, "error", {"message": _clean(line)}).text = _clean(verification.problem)
    if verification.verdict is Verdict.UNAVAILABLE:
        case = _new_case(suite, verification.backend, "the backend can work here")
        SubElement(case, "skipped", {"message": _clean(verification.availability.reason)})
    indent(suites)
    return tostring(suites, encoding="unicode", xml_declaration=False) + "\n"


def _case(suite: Element, backend: str, result: TestResult) -> None:
    case = _new_case(
        suite, f"{backend}.{result.case.part}", result.case.name, f"{result.seconds:.3f}"
    )
    if result.case.promise:
        properties = SubElement(case, "properties")
        SubElement(properties, "property", {"name": "promise", "value": result.case.promise})
    if result.outcome is Outcome.FAILED:
        kind = {"message": _clean(result.message), "type": result.case.promise or "failure"}
        SubElement(case, "failure", kind).text = _clean(result.details)
    elif result.outcome is Outcome.SKIPPED:
        SubElement(case, "skipped", {"message": _clean(result.message)})


def _new_case(suite: Element, classname: str, name: str, time: str = "0.000") -> Element:
    attributes = {"classname": classname, "name": _clean(name), "time": time}
    return SubElement(suite, "testcase", attributes)


def _clean(text: str) -> str:
    return _FORBIDDEN.sub("�", text)
