"""What a text took: figures, receipts, prices, scores and audits."""
