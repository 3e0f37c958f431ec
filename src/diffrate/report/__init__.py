"""One self-contained HTML page about a run: `measure` adds what images can tell, `write_report` writes the page."""

from diffrate.report.measured import measure
from diffrate.report.page import write_report
from diffrate.report.run import Run, read_run

__all__ = ["Run", "measure", "read_run", "write_report"]
