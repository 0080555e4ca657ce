"""Which waiting job a free device runs next: costs, what each device holds, the rule."""
