"""Sweeps: a grid of trainings, each attacked in the same ways. What was done once is not done again.

plan     trainings and attacks, checked and priced before anything runs
work     how they are run: each on its own, going on where an earlier call was stopped
toml     a TOML file that knows on which line its keys stand
file     the grid that a sweep's file describes
folder   a sweep's folder: runs/<training>, sweep.json, sweep.csv, report/ and frontier/
"""
