"""Text that is too large, too deep or no value is refused in one short message."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import yaml

from raysim.config import limited_yaml
from raysim.config.loading import parse_overrides
from raysim.config.loading import read_config as layers
from raysim.errors import ConfigError, shortened
from raysim.prepare.resolve import prepare

BILLION = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join(['*' + below] * 9)}]\n"
    for below, name in zip("abcdefgh", "bcdefghi", strict=True)
)
"""Nine levels of aliases: 9 to the power of 9 values."""

REFUSED = {
    "digits": ("9" * 4400, "a number of 4,400 characters"),
    "hexadecimal": ("0x" + "f" * 4400, "a number of 4,402 characters"),
    "fraction": ("0." + "1" * 600, "a number of 602 characters"),
    "depth": ("[" * 500 + "]" * 500, "more than 32 lists"),
    "depth of mappings": ("{a: " * 500 + "1" + "}" * 500, "more than 32 lists"),
    "unclosed depth": ("[" * 100_000, "more than 32 lists"),
    "size": ("a" * 500_001, "more than 500,000 characters"),
    "many values": ("[" + "[],[],a,b,"[:6] * 100_000 + "]", "more than 500,000 characters"),
    "aliases": (BILLION, "with its aliases written out"),
    "long alias": ("- &a " + "x" * 10_000 + "\n- *a" * 60, "with its aliases written out"),
    "merged aliases": (
        "- &a {key: a value}\n" + "- &b {<<: [" + "*a, " * 60_000 + "*a]}\n",
        "written out",
    ),
    "recursion": ("&a [*a]", "stands for something that it is a part of"),
    "no number to base 60": ("!!int a:b", "'a:b' is no int"),
    "no integer": ("!!int 1.5", "'1.5' is no int"),
    "no number": ("!!float abc", "'abc' is no float"),
    "no switch": ("!!bool abc", "'abc' is no bool"),
    "octal": ("010", "'010' is 8 in YAML; write that, or quotes around a word"),
    "octal in a list": ("[1, -0_7]", "'-0_7' is -7 in YAML"),
    "base 60": ("1:30", "'1:30' is 90 in YAML"),
    "fraction to base 60": ("1:30.5", "'1:30.5' is 90.5 in YAML"),
    "no timestamp": ("!!timestamp x", "'x' is no timestamp"),
    "object": ("!!python/object/apply:os.getcwd []", "could not determine a constructor"),
    "repeated key": ("a: 1\nb: 2\na: 3", "'a' is given twice at line 3"),
    "repeated switch": ("yes: 1\ntrue: 2", "'True' is given twice at line 2"),
    "repeated number": ("0x1: 1\n1: 2", "'1' is given twice at line 2"),
    "mapping as a key": ("{{a: 1}: 2}", "a key must be a word"),
    "surrogate": ("a\udcff", "UTF-8"),
    "control character": ("a\x07", "not allowed"),
}


def test_what_is_within_the_limits_is_read():
    merged = "base: &base {lr: 1e-3, steps: 2}\nmine: {<<: *base, steps: 3}\nlist: [*base, 2024-01-02, 0x10]"
    found = limited_yaml.load_yaml(merged)
    assert found["mine"] == {"lr": 0.001, "steps": 3}
    assert found["list"][1:] == ["2024-01-02", 16]
    assert limited_yaml.load_yaml("[0, 0.5, -0.1, 00.5, '010', 1_000]") == [
        0,
        0.5,
        -0.1,
        0.5,
        "010",
        1000,
    ]
    inside = limited_yaml.load_yaml("- &x {a: 1}\n- - &y {<<: *x, a: 2}\n  - {<<: [*y, *x]}\n")
    assert inside == [{"a": 1}, [{"a": 2}, {"a": 2}]]
    assert (
        limited_yaml.load_yaml("[" * 32 + "]" * 32)
        and limited_yaml.load_yaml("9" * 500) == 10**500 - 1
    )
    two = "- &a {x: 1}\n- &b {y: 2}\n- <<: *a\n  <<: *b\n"
    assert limited_yaml.load_yaml(two)[2] == {"x": 1, "y": 2}
    wide = "".join(f"k{i}: {i}\n" for i in range(20_000))
    assert len(limited_yaml.load_yaml(wide)) == 20_000


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_beyond_the_limits_is_refused_where_it_stands(tmp_path, name):
    text, said = REFUSED[name]
    with pytest.raises(ConfigError, match=r"^local\.lr: ") as caught:
        parse_overrides([f"local.lr={text}"])
    assert said in str(caught.value) and len(str(caught.value)) < 4000
    path = tmp_path / "mine.yaml"
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(ConfigError, match=r"mine\.yaml: ") as caught:
        prepare(path)
    assert len(str(caught.value)) < 4000


@pytest.mark.parametrize("text", ["local.personal=*", "model.freeze=!classifier"])
def test_text_that_needs_quotes_is_explained(text):
    with pytest.raises(ConfigError, match=r"needs quotes, in a shell KEY="):
        parse_overrides([text])
    assert parse_overrides(['local.personal="*"']) == {"local.personal": "*"}


def test_text_that_needs_quotes_in_a_file_is_explained(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("local:\n  personal: *\n")
    with pytest.raises(ConfigError, match=r"line 2.*begins with \*, & or ! needs quotes"):
        prepare(path)


def test_keys_and_names_of_any_length_are_refused_in_a_short_message(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wrong = [
        ("a" * 5000, []),
        ("quickstart", ["a" * 5000 + "=1"]),
        ("quickstart", ["a." * 5000 + "a=1"]),
        ("quickstart", ["model=" + "a" * 5000]),
        ("quickstart", ["seed=[" + "1, " * 5000 + "1]"]),
        ("quickstart", [f"k{i}=1" for i in range(250)]),
    ]
    for source, overrides in wrong:
        with pytest.raises(ConfigError) as caught:
            prepare(source, overrides)
        assert len(str(caught.value)) < 13_000


def test_a_message_is_shortened_in_the_middle_alone():
    assert shortened("key: 'value'\nother: 1") == "key: 'value'\nother: 1"
    cut = shortened("key: '" + "a" * 5000 + "' is no value; give another one")
    assert (
        cut.startswith("key: 'aaa")
        and cut.endswith("a' is no value; give another one")
        and "5,002" in cut
    )
    lines = shortened("\n".join(f"k{i}: unknown" for i in range(1000))).splitlines()
    assert lines[0] == "k0: unknown" and lines[-1] == "… and 960 lines more"


def test_aliases_of_a_few_levels_are_refused_for_what_they_are(tmp_path):
    """Five levels are within the limits: the message is that of a wrong value, and short."""
    path = tmp_path / "mine.yaml"
    levels = "".join(f"  {line}" for line in BILLION.splitlines(True)[:5])
    path.write_text(f"model:\n{levels}rounds: 1\ndata: digits\nalgorithm: fedavg\nseed: *e\n")
    with pytest.raises(ConfigError, match="seed: input should be a valid integer") as caught:
        prepare(path)
    assert len(str(caught.value)) < 5000


def test_overrides_that_are_a_mapping_are_not_parsed():
    assert layers({}, {"a": "1e-3"}) == {"a": "1e-3"}


@pytest.mark.parametrize("shared", [False, True])
def test_values_from_python_have_a_largest_number(shared):
    value = list(range(600_000))
    if shared:
        value = [0]
        for _ in range(8):
            value = [value] * 20
    with pytest.raises(yaml.YAMLError, match="more than 500,000 values"):
        limited_yaml.check_value(value)


def test_plain_values_are_read_back_as_they_were_written():
    value = {"a": {2: 2.0, 0.5: None, True: "1e-3"}, "b": [math.inf, -math.inf], "c": "2024-01-02"}
    assert limited_yaml.load_yaml(limited_yaml.dump_yaml(value)) == value
    assert math.isnan(limited_yaml.load_yaml(limited_yaml.dump_yaml(math.nan)))
    assert limited_yaml.plain([np.int64(1), np.float32(0.5), np.bool_(True)]) == [1, 0.5, True]
    assert limited_yaml.plain({"a": (1, {"c", "b"}), "d": Path("e")}) == {
        "a": [1, ["b", "c"]],
        "d": "e",
    }
    with pytest.raises(ValueError, match=r"^the key \(1, 2\) of a mapping is neither"):
        limited_yaml.plain({(1, 2): 3})
