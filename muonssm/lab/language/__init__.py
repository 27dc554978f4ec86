"""Language modeling: pre-training, instruction tuning, generation, and zero-shot and needle evaluation."""

TASKS = {"language": "task.LanguageTask", "language-bytes": "task.ByteLanguageTask"}
EXTRA = "language"
