"""The processes of one learner: how they meet, what each of them carries, and the one that leads."""
