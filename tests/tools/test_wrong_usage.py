"""A wrong usage prints what a user needs."""

import re

import errors
import pytest


@pytest.mark.parametrize("usage, error, message", errors.CASES, ids=[usage for usage, *_ in errors.CASES])
def test_a_wrong_usage_says_what_to_do(usage, error, message):
    with pytest.raises({"TypeError": TypeError, "ValueError": ValueError}[error]) as raised:
        errors.run(usage)
    assert re.match(re.escape(message).replace(r"\.\.\.", ".*"), str(raised.value))
