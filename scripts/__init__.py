"""Tools of the project: what Make, CI and people who change it run."""
