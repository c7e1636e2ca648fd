"""Tools of the project, for make, CI and developers."""
