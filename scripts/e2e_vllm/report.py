"""The table of the checks: printed row by row, and written as Markdown."""

import contextlib
import datetime
import os
import platform
import traceback

from processes import say


# Subjects of the reports in docs/, by file name; the default is vLLM.
TOPICS = {"e2e-frozen.md": "frozen engines", "e2e-nixl.md": "NIXL"}


class Report:
    def __init__(self):
        self.sections = []  # (title, rows, notes)

    def section(self, title):
        say(f"== {title}")
        self.sections.append((title, [], []))

    def note(self, text):
        say(text)
        self.sections[-1][2].append(text)

    def row(self, check, expected, seen, ok):
        self.sections[-1][1].append((check, str(expected), str(seen), bool(ok)))
        say(f"{'ok  ' if ok else 'FAIL'} {check}: expected {expected}, seen {seen}")

    def equal(self, check, expected, seen):
        self.row(check, expected, seen, expected == seen)

    @contextlib.contextmanager
    def guarded(self, check):
        """Turns an exception of a check into a failed row, so that the next checks run."""
        try:
            yield
        except Exception as error:
            traceback.print_exc(limit=6)
            self.row(check, "no exception", f"{type(error).__name__}: {str(error)[:300]}", False)

    def failures(self):
        return sum(not ok for _, rows, _ in self.sections for *_, ok in rows)

    def checks(self):
        return sum(len(rows) for _, rows, _ in self.sections)

    def write(self, path, command, versions):
        lines = [
            f"# End-to-end results: {TOPICS.get(os.path.basename(path), 'vLLM')}",
            "",
            "This page lists the checks of one run of the router in front of real vLLM engines on a CPU.",
            "`scripts/e2e-vllm.sh` writes it; do not edit it. `scripts/e2e-vllm.sh --help` describes how to run it.",
            "",
            f"- time: {datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d %H:%M} UTC",
            f"- command: `{command}`",
            f"- machine: {os.cpu_count()} cores, {platform.system()} {platform.machine()}, no GPU",
            *[f"- {name}: {version}" for name, version in versions],
            f"- result: {self.checks() - self.failures()} of {self.checks()} checks passed",
        ]
        for title, rows, notes in self.sections:
            lines += ["", f"## {title}", ""]
            lines += [f"- {note}" for note in notes] + ([""] if notes else [])
            lines += ["| check | expected | seen | ok |", "| --- | --- | --- | --- |"]
            for check, expected, seen, ok in rows:
                cells = [cell(c) for c in (check, expected, seen)]
                lines.append(f"| {' | '.join(cells)} | {'yes' if ok else '**no**'} |")
        with open(path, "w", encoding="utf-8") as f:
            f.write("\n".join(lines) + "\n")


def cell(text):
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ")


def short(text, limit=48):
    """Returns text for a table cell: on one line, without the middle if it is long."""
    text = repr(text)
    return text if len(text) <= limit else f"{text[: limit // 2]}…{text[-limit // 2 :]}"
