"""Learning a schedule: see run.py for the loop, fast.py and paper.py for the two recipes."""

from diffrate.searching.run import SearchResult, search

__all__ = ["SearchResult", "search"]
