"""Is a replay what eager computes, and if not, where and why not?"""
