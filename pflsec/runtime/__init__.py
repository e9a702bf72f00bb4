"""Running a federation: the round loop, evaluation, probes, replays, and run folders."""
