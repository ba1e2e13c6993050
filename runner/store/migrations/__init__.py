"""The schema's history: one Alembic chain with one head for SQLite and PostgreSQL.

To change the schema: (1) add ``versions/r<number>_<what>.py`` with the next number, on top of the last one, like its
neighbours: SQL in ``FORTH`` and ``BACK``, and in ``LOSES`` a query for each thing that a way back would lose (it yields
a row while there is something). (2) Make the same change in ``runner/store/sql/schema.sql``, a new column behind the
last one of its table. (3) Raise ``SCHEMA_VERSION`` in ``runner/store/sql/schema.py``. (4) Say in
``tests/store/migrations/old.py`` what code of that version may have written, and in ``test_chain.py`` the revision's
digest. The tests prove that both ways to a database are equal. A released revision is never edited.

``chain`` says what leads from one version to another; it imports Alembic, so import it only where a database is
migrated. ``sqlite`` performs it on a file, ``runner.store.postgres.schema`` on a server.
"""
