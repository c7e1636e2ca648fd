"""Chooses how an engine drafts: not at all, with the server, with the model's own drafter, or with both.

`prices` learns what the parts of a step cost, `worth` what each of the four `modes` yields for that, and `chooser`
decides for the whole batch. If the model has a drafter of its own (MTP and EAGLE heads, a small draft model), `drafts`
takes the better of two drafts for each request, and `model_drafter` runs all of it in the steps of vLLM.
"""
