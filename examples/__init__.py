"""Small programs that use HistoSpec as anybody would."""
