"""What people look at: tables in the terminal, the HTML page, the Chrome trace."""
