"""Does everybody make the same call?"""
