"""Foreign names made safe for text, XML and terminals."""

import unicodedata
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geodl.cli import main
from geodl.cli.display import console, echo, plain
from geodl.core.text import printable, readable

# Every code point, halves of surrogate pairs too.
ANYTHING = st.text(st.integers(0, 0x10FFFF).map(chr))


@pytest.mark.parametrize(
    ("given_text", "shown"),
    [
        ("Katze 小猫 é עברית \u200d", "Katze 小猫 é עברית \u200d"),
        ("\x1b[31mred\x07", r"\x1b[31mred\x07"),
        ("two\nlines\r\t", r"two\nlines\r\t"),
        ("\u202egnp.exe \u2066x\u2069", r"\u202egnp.exe \u2066x\u2069"),
        ("\x9b\u2028\ud800\uffff", r"\x9b\u2028\ud800\uffff"),
    ],
)
def test_printable(given_text, shown):
    assert printable(given_text) == shown


@given(ANYTHING)
def test_printable_text_can_be_written_anywhere(text):
    shown = printable(text)
    shown.encode()
    assert not {unicodedata.category(sign) for sign in shown} & {"Cc", "Cs", "Zl", "Zp"}
    assert not {unicodedata.bidirectional(sign) for sign in shown} & set(
        "LRE RLE LRO RLO PDF LRI RLI FSI PDI".split()
    )
    element = ElementTree.Element("text")
    element.text = shown
    assert (ElementTree.fromstring(ElementTree.tostring(element)).text or "") == shown
    assert printable(shown) == shown


@given(ANYTHING)
def test_no_control_characters_reach_the_terminal(text):
    with console.capture() as captured:
        echo(f"class {text}")
        console.print(plain(text, "bold") + plain(text))
    written = captured.get().replace("\n", "")
    assert not {unicodedata.category(sign) for sign in written} & {"Cc", "Cs"}


def test_errors_contain_no_control_characters(capsys):
    with pytest.raises(SystemExit):
        main(["runs", "show", "no\x1b[31m\u202erun"])
    assert r"no\x1b[31m\u202erun" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("count", "text"), [(999, "999 bytes"), (1500, "1.5 kB"), (2_500_000, "2.5 MB")]
)
def test_readable(count, text):
    assert readable(count) == text
