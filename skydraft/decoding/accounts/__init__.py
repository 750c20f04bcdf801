"""Accounts of a text: figures, receipts, prices, scores and audits."""
