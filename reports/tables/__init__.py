"""Runs as data frames of plain numbers: accuracies in [0, 1], PSNR in dB, sizes in MB of 10^6 bytes.

A missing number is NaN, and a column beside it says why.

rows        what all share
accuracy    how accurate runs are; what they send; what privacy they have spent
leakage     what attacks found, by run and attack, and victim by victim
headline    the worst case of every method
membership  who was in a victim batch
mixed       what attacks found of mixed images
tokens      what attacks on texts recovered
run         one run in full: wire and configuration
"""

from pflsec.reports.tables.accuracy import (
    accuracy_table,
    epsilon_label,
    epsilon_unit,
    no_guarantee,
    norm_lines,
    norms_table,
    privacy_table,
    traffic_table,
)
from pflsec.reports.tables.headline import headline_table
from pflsec.reports.tables.leakage import leakage_table, rounds_table, victims_table
from pflsec.reports.tables.membership import membership_table
from pflsec.reports.tables.mixed import mixed_table
from pflsec.reports.tables.rows import CLAIM, FAILED, ILLUSTRATES, SETTING, SUCCESS, as_text, records
from pflsec.reports.tables.run import configuration_table, wire_table
from pflsec.reports.tables.tokens import tokens_table

__all__ = [
    "CLAIM",
    "FAILED",
    "ILLUSTRATES",
    "SETTING",
    "SUCCESS",
    "accuracy_table",
    "as_text",
    "configuration_table",
    "epsilon_label",
    "epsilon_unit",
    "headline_table",
    "leakage_table",
    "membership_table",
    "mixed_table",
    "no_guarantee",
    "norm_lines",
    "norms_table",
    "privacy_table",
    "records",
    "rounds_table",
    "tokens_table",
    "traffic_table",
    "victims_table",
    "wire_table",
]
