"""What a revision writes with."""

from __future__ import annotations

from typing import cast

from alembic import op

from runner.store.sql.dialect import Dialect, statements


def run(text: str) -> None:
    """Execute schema SQL (``runner.store.sql.dialect``) in the database of this migration."""
    for statement in statements(text, cast("Dialect", op.get_context().dialect.name)):
        op.execute(statement)
