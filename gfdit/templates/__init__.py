"""What is kept of templates (images that many requests edit): keys and values, in host memory and on disk.

Its modules are imported one by one: what may be asked of an edit is read where there is no torch (``budget``).
"""
