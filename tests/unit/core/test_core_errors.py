"""An error's one line."""

from __future__ import annotations

import pytest

from stoker.core.errors import Plain, UserError


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (UserError("a must be b", got=3, fix="Say b."), "a must be b. Received: 3. Say b."),
        (UserError("a must be b.", got=None), "a must be b. Received: None."),
        (UserError("a\nmust be b", got=Plain("two\nlines")), "a must be b. Received: two lines."),
        (
            UserError("c must be d", got=Plain(UserError("a must be b", got="e.").line())),
            "c must be d. Received: a must be b. Received: 'e.'.",
        ),
        (UserError("a must be b", got=Plain("x" * 300)), f"a must be b. Received: {'x' * 200}..."),
    ],
)
def test_it_is_one_line_with_one_full_stop_behind_each_part(error: UserError, line: str) -> None:
    assert error.line() == str(error) == line
