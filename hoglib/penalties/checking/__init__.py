"""The examiner of gradient penalties: does a penalty compute what it is meant to compute?"""
