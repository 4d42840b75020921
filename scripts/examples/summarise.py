"""Summarises every text of a folder, long ones piece by piece.

    python scripts/examples/summarise.py FOLDER --model MODEL --output summaries

Each *.txt of the folder is cut into pieces; all pieces are summarised in one job, and then the
summaries of each text's pieces in another, until one is left for each text. A model with a chat
template is asked as in a conversation. Interrupted jobs resume with the same command.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from flexgen_jax import LLM, UserError
from flexgen_jax.jobs.job import Job
from flexgen_jax.jobs.options import JobOptions

REQUEST = "Summarise the following text in a few sentences."


def pieces(text: str, most: int) -> list[str]:
    """Cuts a text into pieces of at most `most` characters, between paragraphs or words."""
    found: list[str] = []
    while len(text) > most:
        cut = max(text.rfind("\n\n", most // 2, most), text.rfind(" ", most // 2, most))
        cut = cut if cut > 0 else most
        found.append(text[:cut].strip())
        text = text[cut:]
    return [piece for piece in [*found, text.strip()] if piece]


def request(name: str, text: str, tokens: int, is_chat: bool) -> dict[str, Any]:
    """Returns a line of a job that asks for a summary."""
    asked: dict[str, Any] = {"id": name, "max_tokens": tokens, "temperature": 0}
    if is_chat:
        content = f"{REQUEST}\n\n{text}"
        return {**asked, "messages": [{"role": "user", "content": content}]}
    return {**asked, "prompt": f"{text}\n\n{REQUEST}\n\nSummary:", "repetition_penalty": 1.2}


def can_chat(llm: LLM) -> bool:
    try:
        llm.chat_prompt([{"role": "user", "content": "Hello"}])
    except UserError:
        return False
    return True


def summarised(
    llm: LLM, folder: Path, level: int, texts: dict[str, list[str]], tokens: int
) -> dict[str, list[str]]:
    """Runs one job that summarises each piece of each text; returns the summaries."""
    source, results = (folder / f"level-{level}.{what}.jsonl" for what in ("in", "out"))
    is_chat = can_chat(llm)
    with open(source, "w", encoding="utf-8") as file:
        for name, parts in texts.items():
            for number, part in enumerate(parts):
                line = request(f"{name}#{number}", part, tokens, is_chat)
                file.write(json.dumps(line) + "\n")
    Job(llm, JobOptions(source, results, is_ordered=True)).run()
    found: dict[str, list[str]] = {name: [] for name in texts}
    for result in results.read_text(encoding="utf-8").splitlines():
        record = json.loads(result)
        if record["error"] is not None:
            raise SystemExit(f"{record['id']}: {record['error']['message']}")
        found[record["id"].rpartition("#")[0]].append(record["text"].strip())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", help="default: the small model of the package")
    parser.add_argument("--output", type=Path, default=Path("summaries"))
    parser.add_argument("--characters", type=int, default=1200, help="of a piece, at most")
    parser.add_argument("--tokens", type=int, default=96, help="of a summary, at most")
    args = parser.parse_args()
    files = sorted(args.folder.glob("*.txt"))
    if not files:
        parser.error(f"{args.folder} has no *.txt")
    texts = {path.name: pieces(path.read_text(encoding="utf-8"), args.characters) for path in files}
    texts = {name: parts for name, parts in texts.items() if parts}
    args.output.mkdir(parents=True, exist_ok=True)
    whole: dict[str, str] = {}
    level = 0
    with LLM(args.model, progress=True) as llm:
        while texts:
            made = summarised(llm, args.output, level, texts, args.tokens)
            before, level = texts, level + 1
            joined = {name: "\n\n".join(filter(None, parts)) for name, parts in made.items()}
            texts = {name: pieces(text, args.characters) for name, text in joined.items()}
            # A text is done when one piece has made it, or when its summaries are no fewer.
            done = [n for n in before if len(before[n]) == 1 or len(texts[n]) >= len(before[n])]
            whole |= {name: joined[name] for name in done}
            texts = {name: parts for name, parts in texts.items() if name not in done and parts}
    for name, summary in whole.items():
        (args.output / name).write_text(summary + "\n", encoding="utf-8")
    empty = [name for name in whole if not whole[name]]
    print(f"{len(whole)} summaries are in {args.output}, {len(empty)} of them empty")


if __name__ == "__main__":
    main()
