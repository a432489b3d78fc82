"""The slides of a cohort and what is known of each: cohort files, folders, single files."""

from gigagrad.cohorts.cohort import Cohort, Size, cases_of, check_cases, check_images, class_table, read_cohort
from gigagrad.cohorts.rows import SPLITS, Row, Split, folds_of, is_table, read_rows, survival_of
from gigagrad.cohorts.slides import find_slides

__all__ = [
    "SPLITS",
    "Cohort",
    "Row",
    "Size",
    "Split",
    "cases_of",
    "check_cases",
    "check_images",
    "class_table",
    "find_slides",
    "folds_of",
    "is_table",
    "read_cohort",
    "read_rows",
    "survival_of",
]
