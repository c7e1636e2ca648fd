"""Who may do what, and the files that say so."""
