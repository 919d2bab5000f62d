"""Blocks of a chain: what each is, reaches, does and costs; a call of `chain` taken apart; how finely it is cut."""
