"""What a run shows: a verdict, pictures, and what other policies would have done."""

from gradscale.report.page import report
from gradscale.report.tune import Candidate, tune
from gradscale.report.verdict import Finding, findings
from gradscale.report.what_if import Prediction, predict

__all__ = ["Candidate", "Finding", "Prediction", "findings", "predict", "report", "tune"]
