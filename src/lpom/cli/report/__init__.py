"""``lpom report``: one HTML page about one run, or several beside each other."""

from lpom.cli.report.page import write_report

__all__ = ["write_report"]
