"""Who may start, and with how many tokens: ledger, token ratio, budget, chunk sizes."""
