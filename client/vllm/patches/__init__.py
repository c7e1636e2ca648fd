"""Every place where HistoSpec changes vLLM at run time."""
