"""Which buckets suit the sizes that steps had?"""
