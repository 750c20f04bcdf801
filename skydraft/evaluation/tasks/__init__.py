"""Tasks: prompts with a check of the answer. How much of the gap between two models does a mode close?"""
