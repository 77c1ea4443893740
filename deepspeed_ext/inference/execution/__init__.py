"""Running a model: steps of prefill and decode, cache, sampling."""
