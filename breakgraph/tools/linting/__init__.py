"""What of a forward could not be captured, or would be wrong at a replay?"""
