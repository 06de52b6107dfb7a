"""The variables of amem: one list, in the hook, of all that anything reads or documents."""

import re

from built import ROOT

# Read by tests, by the build, and by the simulator.
OTHERS = ("AMEM_SIM_", "AMEM_TEST_", "AMEM_WHEEL", "AMEM_NATIVE_", "AMEM_BUILD")


def listed() -> "set[str]":
    source = (ROOT / "golib" / "hook" / "config.c").read_text()
    table = re.search(r"known\[\] = \{(.*?)\};", source, re.S)
    assert table
    return set(re.findall(r'"(AMEM_\w+)"', table.group(1)))


def read() -> "set[str]":
    """Each name that is in quotes where the environment is read."""
    names = set()
    for folder, pattern in (("golib/hook", "*.c"), ("golib", "**/*.go"), ("python/amem", "*.py")):
        for path in (ROOT / folder).glob(pattern):
            if not path.name.endswith("_test.go"):
                names |= set(re.findall(r'"(AMEM_[A-Z][A-Z_]*[A-Z])"', path.read_text()))
    return names


def test_the_hook_lists_every_variable_that_is_read() -> None:
    assert {name for name in read() if not name.startswith(OTHERS)} | {"AMEM_SIM_LIBRARY_DIR"} == listed()


def test_the_readme_has_a_row_for_each() -> None:
    rows = set(re.findall(r"^\| `(AMEM_\w+)` \|", (ROOT / "README.md").read_text(), re.M))
    assert rows == listed()
