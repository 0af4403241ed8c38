"""A torch task on several processes of a learner: its module spread over them, and what they compute together."""
