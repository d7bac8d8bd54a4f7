"""`Buffer`: its fields, its methods, and the pure cores behind them."""
