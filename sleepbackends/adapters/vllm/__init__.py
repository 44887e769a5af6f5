"""Sleep mode of vLLM on the backends here, and backends written for vLLM in our orchestrator."""
