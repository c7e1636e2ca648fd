"""Measurements, most of them in comparison with peers; README.md says what each one answers."""
