"""Process groups: members, communicators, and the state of this process."""
