"""The paper's tables and figures: which runs each needs, how long they take, and what is written when they are done."""
