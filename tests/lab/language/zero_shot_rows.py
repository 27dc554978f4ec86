"""Made rows of the nine zero-shot tasks, with the columns of their data sets."""

from __future__ import annotations

import json

WORDS = "the cat sat on a mat while green birds sing in old trees and rain falls over every quiet hill"
QUESTION = {"question": "Why?", "choices": {"text": ["yes", "no"], "label": ["A", "B"]}, "answerKey": "B"}
ROWS = {  # one good row of each task, as its data set has it
    "wikitext": {"page": " = Title = \n \n Text of it . \n"},
    "lambada_openai": {"text": "The cat sat on the mat"},
    "piqa": {"goal": "Sit", "sol1": "on a mat", "sol2": "on a cat", "label": 1},
    "hellaswag": {
        "activity_label": "Sitting", "ctx_a": "A cat sits.", "ctx_b": "it",
        "endings": ["sings", "sleeps on", "is a tree", "rains"], "label": "2",
    },
    "winogrande": {"sentence": "The cat saw the bird so _ flew.", "option1": "cat", "option2": "bird", "answer": "2"},
    "arc_easy": QUESTION,
    "arc_challenge": QUESTION,
    "social_iqa": {
        "context": "It rained.", "question": "Who?", "answerA": "a", "answerB": "b", "answerC": "c", "label": "3",
    },
    "boolq": {"question": "is rain wet", "passage": "Rain is wet.", "label": 1},
}  # fmt: skip


def sample(name, random):
    """A row of a task with random words, so that choices differ."""

    def words(count=4):
        return " ".join(random.choices(WORDS.split(), k=count))

    row = json.loads(json.dumps(ROWS[name]))
    if name == "wikitext":
        return {"page": f" = {words(2)} = \n \n {words(30)} . \n"}
    for key, value in row.items():
        if key == "sentence":
            row[key] = f"{words()} _ {words()}"
        elif key == "endings":
            row[key] = [words(random.randint(1, 4)) for _ in value]
        elif key == "choices":
            row[key] = {"text": [words(random.randint(1, 4)) for _ in "AB"], "label": ["A", "B"]}
        elif key == "answerKey":
            row[key] = random.choice("AB")
        elif key == "label":
            row[key] = type(value)(
                random.randint(*{"piqa": (0, 1), "hellaswag": (0, 3), "boolq": (0, 1)}.get(name, (1, 3)))
            )
        elif key == "answer":
            row[key] = str(random.randint(1, 2))
        else:
            row[key] = words(8 if key in ("text", "passage") else 3)
    return row


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
