"""Cleans tables with a language model, as in FlexGen's section 6.2: a few examples, then a question
for each row.

    python scripts/examples/wrangle.py match|impute|errors --model MODEL [--data CSV] [--examples N]

match: do the columns a and b name the same thing? impute: what belongs into the column that is
left empty? errors: is there an error in the row? Without --data, a small table is made up. The
first rows of the table are the examples, and the last column has the answers, so that the accuracy
can be told. Requests and results lie in --folder, and an interrupted job resumes.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
from collections.abc import Sequence
from pathlib import Path

from flexgen_jax import LLM
from flexgen_jax.jobs.job import Job
from flexgen_jax.jobs.options import JobOptions

Row = dict[str, str]

QUESTIONS = {
    "match": "Are these two the same product? yes or no?",
    "impute": "Which city is it?",
    "errors": "Is there an error in this row? yes or no?",
}
CITIES = {"0117": "Paris", "0221": "London", "0342": "Rome", "0455": "Vienna", "0568": "Madrid"}
PRODUCTS = ("lamp", "table", "chair", "phone", "camera", "bottle", "mirror", "clock")


def invented(task: str, count: int) -> list[Row]:
    """Makes up a table for a task; its last column has the answers."""
    rng = random.Random(0)  # noqa: S311 - no secret
    rows: list[Row] = []
    for _ in range(count):
        product, size = rng.choice(PRODUCTS), str(rng.randrange(10, 99))
        code, city = rng.choice(list(CITIES.items()))
        is_yes = rng.random() < 0.5
        if task == "match":
            other = size if is_yes else str(int(size) + 1)
            rows.append({"a": f"{product} {size} cm", "b": f"{other}cm {product.upper()}"})
        elif task == "impute":
            rows.append({"product": product, "phone": f"{code}-{size}{size}"})
        else:
            price = f"-{size}" if is_yes else size
            rows.append({"product": product, "price": price, "city": city})
        rows[-1]["answer"] = city if task == "impute" else "yes" if is_yes else "no"
    return rows


def read(path: Path) -> list[Row]:
    """Reads a table; its first line has the names of its columns."""
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def question(row: Row, task: str) -> str:
    """Writes a row as a question, up to its answer."""
    *columns, _ = row
    return ". ".join(f"{name}: {row[name]}" for name in columns) + f". {QUESTIONS[task]} Answer:"


def answer(row: Row) -> str:
    return row[list(row)[-1]].strip()


def write_requests(path: Path, rows: Sequence[Row], examples: Sequence[Row], task: str) -> None:
    """Writes a request for each row; all begin with the examples."""
    shown = "".join(f"{question(row, task)} {answer(row)}\n\n" for row in examples)
    longest = max(len(answer(row)) for row in [*examples, *rows])
    with open(path, "w", encoding="utf-8") as file:
        for number, row in enumerate(rows):
            request = {
                "id": str(number),
                "prompt": shown + question(row, task),
                "max_tokens": 4 + longest // 2,
                "temperature": 0,
                "stop": "\n",
            }
            file.write(json.dumps(request) + "\n")


def accuracy(results: Path, rows: Sequence[Row]) -> float:
    """Returns the share of rows whose text is their answer, without regard to case."""
    right = 0
    for line in results.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        said = record.get("text", "").strip().strip(".").lower()
        right += said == answer(rows[int(record["id"])]).lower()
    return right / len(rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", choices=list(QUESTIONS))
    parser.add_argument("--model", help="default: the small model of the package")
    parser.add_argument("--data", type=Path, help="a table as CSV, its answers in the last column")
    parser.add_argument("--examples", type=int, default=6)
    parser.add_argument("--folder", type=Path, default=Path("wrangled"))
    args = parser.parse_args()
    table = read(args.data) if args.data else invented(args.task, 60)
    examples, rows = table[: args.examples], table[args.examples :]
    if not rows:
        parser.error(f"the table has {len(table)} rows: all of them would be examples")
    args.folder.mkdir(parents=True, exist_ok=True)
    source, results = (args.folder / f"{args.task}.{what}.jsonl" for what in ("in", "out"))
    write_requests(source, rows, examples, args.task)
    with LLM(args.model, progress=True) as llm:
        summary = Job(llm, JobOptions(source, results, is_ordered=True)).run()
    print(f"{args.task}: {accuracy(results, rows):.0%} of {summary.total} rows are right")


if __name__ == "__main__":
    main()
