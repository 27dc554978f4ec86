"""Synthetic memory tests: associative recall, selective copying, induction heads, passkey retrieval."""

TASKS = {"recall": "task.RecallTask"}
EXTRA = "language"
