"""What is JSON, and what of it is taken."""

import pytest

from wscope_jax.strict_json import parse_object


def test_an_object() -> None:
    assert parse_object('{"a": [1, 2.5, null, {"a": "b"}]}') == {"a": [1, 2.5, None, {"a": "b"}]}


@pytest.mark.parametrize(
    ("text", "about"),
    [
        ("", "not valid JSON"),
        ("{", "not valid JSON"),
        ("[" * 10**5, "nested too deeply"),
        ('{"a": ' + "9" * 5000 + "}", "not valid JSON"),
        ("[]", r"a JSON object, found \[\]"),
        ('{"a": 1, "b": {"c": 1, "c": 2}}', "the key 'c' is there twice"),
        ('{"a": NaN}', "holds NaN"),
        ('{"a": -Infinity}', "holds -Infinity"),
        ('{"\x1b[2J": 1, "\x1b[2J": 1}', "not valid JSON"),
    ],
)
def test_refused(text: str, about: str) -> None:
    with pytest.raises(ValueError, match=about) as caught:
        parse_object(text)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 200
