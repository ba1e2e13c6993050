"""The harness catalogue: which coding agents there are, how each is installed, checked and started.

``spec`` holds the words, ``catalogue`` the list, ``installer`` and ``probe`` the work on disk. Each
harness has one file, the only place with its name.
"""
