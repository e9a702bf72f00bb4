"""Attacks with one set of options, on a run or on an update from elsewhere: what is attacked, scored and written."""
