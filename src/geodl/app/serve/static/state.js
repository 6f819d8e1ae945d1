// State shared by the modules of the page. model: the response of GET model; state: the version of the model in the last
// event, null while the server does not answer; round: increases whenever predictions may have changed; jobs, tray and
// pictures: the server's; shown: the classes that were added on this page and have no images yet.
export const page = { model: null, state: null, round: 0, jobs: [], tray: [], pictures: [], shown: new Set() };

export const locked = () => Boolean(page.model && page.model.read_only);
