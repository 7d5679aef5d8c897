from datasync.cli import main

main()
